"""Operations on pages. Each folder: the public function, the reference (the definition of correct), the kernels."""
