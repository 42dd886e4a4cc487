"""Networks: the paper's AlexNet, other backbones by name, and the two streams around them."""
