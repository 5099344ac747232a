variable "region" {
  type        = string
  description = "Where the lake, the catalog and Spark are."
}

variable "name" {
  type        = string
  default     = "cdc-assets"
  description = "Prefix of everything that is made here."
}

variable "lake_bucket" {
  type        = string
  description = "The bucket to be made for the lake and the staged changes; names are global."
}

variable "namespaces" {
  type        = set(string)
  description = "The Glue databases: lake.namespace of every source, and namespace of tables that have their own."

  validation {
    condition     = alltrue([for name in var.namespaces : can(regex("^[a-z_][a-z0-9_]*$", name))])
    error_message = "A namespace is one plain lower-case word, as in lake.namespace."
  }
}

variable "vpc_id" {
  type        = string
  description = "The network of Spark, of what runs Dagster, and of the source."
}

variable "subnet_id" {
  type        = string
  description = "A private subnet with a way to S3 and Glue (endpoints or NAT)."
}

variable "client_security_group_id" {
  type        = string
  description = "The security group of what runs the code server: it alone may reach Spark Connect."
}

variable "emr_release" {
  type        = string
  default     = "emr-spark-8.1.0"
  description = "An EMR release with Spark 4.1: the Iceberg runtime of cdc_assets is made for it."
}

variable "spark_python_archive" {
  type        = string
  description = "What python -m cdc_assets.lake.spark.python_archive made, for instance_type's processor and a Python that the release has: 3.11 or 3.13."
}

variable "spark_jars_folder" {
  type        = string
  description = "Where python -m cdc_assets.lake.spark.jars --to FOLDER put Spark's jars."
}

variable "certificates_file" {
  type        = string
  description = "A zip of privateKey.pem, certificateChain.pem and trustedCertificates.pem, as EMR takes them, for TLS between its nodes."
}

variable "instance_type" {
  type        = string
  default     = "m7g.xlarge"
  description = "Of every node. A merge is bounded by cores, a snapshot by network."
}

variable "core_instances" {
  type        = number
  default     = 2
  description = "Nodes beside the primary one."
}

variable "source_secret_arns" {
  type        = list(string)
  default     = []
  description = "Secrets Manager secrets with the DSNs, which the code server may read."
}

variable "noncurrent_days" {
  type        = number
  default     = 7
  description = "How long a removed file can be brought back. Longer than that nothing is kept twice."
}
