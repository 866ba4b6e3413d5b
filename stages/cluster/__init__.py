"""cluster: group the FFN neurons of every layer into experts."""
