"""The batch API under its largest files, with engines that take no CPU."""
