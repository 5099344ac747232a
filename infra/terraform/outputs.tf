output "warehouse" {
  value       = "s3://${aws_s3_bucket.lake.bucket}/warehouse"
  description = "lake.catalog.warehouse, with type: glue."
}

output "staging" {
  value       = "s3://${aws_s3_bucket.lake.bucket}/staging"
  description = "staging.uri."
}

output "spark_remote" {
  value       = "sc://${aws_emr_cluster.spark.master_public_dns}:15002"
  description = "spark.remote. In a private subnet the name is the private one."
}

output "lake_policy_arn" {
  value       = aws_iam_policy.lake.arn
  description = "To be attached to the role of the code server and the flusher."
}

output "secrets_policy_arn" {
  value       = one(aws_iam_policy.secrets[*].arn)
  description = "To be attached there, too."
}
