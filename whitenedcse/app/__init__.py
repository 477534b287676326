"""Running the package: launching, ranks, run directories, settings, files and the command line."""
