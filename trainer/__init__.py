"""What runs on the nodes, inside the packed environment. It and ``provision`` never import each other."""
