"""One config reader a family. Each module's `READERS` maps `model_type` to the reader of such configs."""
