"""interlace inside other people's frameworks; none of these is imported before its module here is used."""
