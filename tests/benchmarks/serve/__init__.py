"""The service beside other servers, on one machine with one model and one load."""
