"""A real Kubernetes on this machine for the tests: API server, controller manager, scheduler, kubelets, containerd."""
