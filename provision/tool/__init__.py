"""clusterctl itself as one file: its Python, its packages and their libraries, behind a script that unpacks them."""
