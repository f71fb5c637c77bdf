"""Per-sample gradients of a small language model: the job that ``python -m funcckpt`` runs."""
