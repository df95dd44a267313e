"""The lower level with sparse rows and a sparse Hessian, solved on the host."""
