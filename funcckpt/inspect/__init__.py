"""What a function keeps, and what its checkpoints cost: `residuals`, `explain`, `plot`."""
