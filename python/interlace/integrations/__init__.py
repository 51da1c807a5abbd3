"""interlace inside other frameworks; each framework is imported only when its module here is used."""
