"""The service beside other servers, on one machine with the same model and load."""
