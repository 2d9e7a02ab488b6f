"""Parts of `sluice bench scale`: measured costs, the simulated fleet, and the real run that it is compared with."""
