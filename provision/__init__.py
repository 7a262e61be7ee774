"""clusterctl: moves a conda environment into an air-gapped GPU cluster and trains on it."""

__version__ = "0.1.0"
