"""One model file a family. Each module's `FAMILIES` maps a spec's `family` to what builds and names it."""
