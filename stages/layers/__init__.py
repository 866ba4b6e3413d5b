"""What narrowing each layer alone costs, and the layers that stay dense by these costs."""
