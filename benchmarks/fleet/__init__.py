"""What `sluice bench scale` is made of: measured costs, the simulated fleet, and the real run that it is compared with."""
