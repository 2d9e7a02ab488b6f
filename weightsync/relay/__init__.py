"""Services behind services, and how engines find the nearest."""
