"""What the receiver uses: sources of versions, pulls, the file of a version, files shared by a host, adapters."""
