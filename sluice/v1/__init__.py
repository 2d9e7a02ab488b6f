"""Generated stubs of the Sluice contracts; `make proto` writes them."""
