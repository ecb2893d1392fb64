"""What must be measured on a GPU, in stages that each write one JSON: see `quarter.sh`."""
