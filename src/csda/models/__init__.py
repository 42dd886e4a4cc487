"""Networks: the paper's AlexNet, other backbones by name, and the model with teacher and student."""
