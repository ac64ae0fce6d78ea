"""The contract between preparation and training: schemas, the dataset registry, and what a sample is."""
