"""The engines that sample, each a package, and what they have in common."""
