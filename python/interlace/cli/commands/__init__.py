"""The commands of one file each."""
