"""What must be measured on a GPU, in parts that each write one JSON: see `run_all.sh`."""
