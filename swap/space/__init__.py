"""Which bytes of the files hold which version of which object, and which are free. Moves nothing."""
