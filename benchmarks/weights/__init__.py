"""The weight path measured: `sluice bench weightsync`."""
