"""The Kubernetes backend: every attempt is a bare pod."""
