"""What survives the process: records, manifests, the directory of a run."""
