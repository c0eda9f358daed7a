"""Language models: from text to token shards, and from a trained run to text and numbers."""
