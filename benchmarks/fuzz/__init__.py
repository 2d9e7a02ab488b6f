"""`sluice bench fuzz`: hostile input for every RPC, every HTTP route and every parser."""
