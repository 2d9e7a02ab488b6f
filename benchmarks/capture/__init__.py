"""`sluice bench capture`: agents of every dialect train a run while its services are killed, and every token is compared."""
