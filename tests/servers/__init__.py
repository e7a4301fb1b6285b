"""Real servers for the tests: started when first needed, shared by all workers."""
