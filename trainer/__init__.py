"""A PPO trainer for language models that saves to and resumes from a storage URI."""
