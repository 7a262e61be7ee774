"""Export bundles as conda-pack archives, and import such archives."""
