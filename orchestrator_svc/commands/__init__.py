"""What `sluice` does with runs and models beside the service: each module or package is one verb."""
