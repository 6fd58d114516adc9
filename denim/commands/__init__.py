"""The commands of `denim`, one file each. What costs time to import, they import when they run."""
