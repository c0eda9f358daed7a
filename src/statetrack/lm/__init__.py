"""Language models: text to token shards, and what is done with trained models."""
