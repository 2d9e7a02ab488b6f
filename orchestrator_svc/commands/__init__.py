"""Commands of `sluice` that work on runs and models, beside the service. Each module or package is one verb."""
