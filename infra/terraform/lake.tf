# The lake: one bucket for tables and staged changes, one Glue database a source.

resource "aws_s3_bucket" "lake" {
  bucket = var.lake_bucket
}

resource "aws_s3_bucket_public_access_block" "lake" {
  bucket                  = aws_s3_bucket.lake.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_server_side_encryption_configuration" "lake" {
  bucket = aws_s3_bucket.lake.id
  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "aws:kms"
    }
    bucket_key_enabled = true
  }
}

resource "aws_s3_bucket_versioning" "lake" {
  bucket = aws_s3_bucket.lake.id
  versioning_configuration {
    status = "Enabled"
  }
}

# Maintenance removes what nothing refers to; here only what it can't see goes. No rule may expire
# objects by age: staged changes and table files are live for as long as something names them.
resource "aws_s3_bucket_lifecycle_configuration" "lake" {
  bucket     = aws_s3_bucket.lake.id
  depends_on = [aws_s3_bucket_versioning.lake]

  rule {
    id     = "uploads-that-were-never-completed"
    status = "Enabled"
    filter {}
    abort_incomplete_multipart_upload {
      days_after_initiation = 2
    }
  }

  rule {
    id     = "removed-files"
    status = "Enabled"
    filter {}
    noncurrent_version_expiration {
      noncurrent_days = var.noncurrent_days
    }
  }
}

resource "aws_glue_catalog_database" "namespace" {
  for_each     = var.namespaces
  name         = each.key
  location_uri = "s3://${aws_s3_bucket.lake.bucket}/warehouse/${each.key}.db"
}
