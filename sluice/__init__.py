"""What every Sluice service shares, and the SDK that users import."""
