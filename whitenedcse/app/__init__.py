"""What a process needs to run: launching, ranks, run directories, settings, files, the command line."""
