# Spark Connect on EMR. Its settings are those of infra/docker/spark.properties.

locals {
  connect_port = 15002
  # As cdc_assets/lake/spark/jars.py has them; the catalog is Glue, so there is no JDBC driver.
  spark_jars = {
    "iceberg-spark-runtime-4.1_2.13-1.12.0.jar" = "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82"
    "iceberg-aws-bundle-1.12.0.jar"             = "dd7e49ffa4ac9b215bed846581991259e3aec9bb2fa08d6cec029c46cd66d957"
  }
  spark_defaults = {
    "spark.jars"                      = join(",", [for jar in aws_s3_object.jar : "s3://${jar.bucket}/${jar.key}"])
    "spark.scheduler.mode"            = "FAIR"
    "spark.scheduler.allocation.file" = "s3://${aws_s3_object.scheduler.bucket}/${aws_s3_object.scheduler.key}"
    "spark.sql.extensions"            = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
    "spark.sql.catalogImplementation" = "in-memory"
    "spark.sql.session.timeZone"      = "UTC"
    # YARN unpacks our Python beside each executor. A Connect server asks the second key, and not
    # spark.pyspark.python.
    "spark.yarn.dist.archives"                 = "s3://${aws_s3_object.python.bucket}/${aws_s3_object.python.key}#cdc_assets"
    "spark.sql.execution.pyspark.python"       = "../cdc_assets/bin/python"
    "spark.python.daemon.module"               = "cdc_assets.snapshot.python_daemon"
    "spark.sql.artifact.isolation.enabled"     = "false"
    "spark.connect.grpc.maxInboundMessageSize" = "268435456"
    "spark.connect.grpc.binding.port"          = tostring(local.connect_port)
    # Else each call of a DataFrame's method looks for a notebook, all over the search path.
    "spark.python.sql.dataFrameDebugging.enabled" = "false"
  }
}

# Jobs share the cores by turns, as on a server of one's own.
resource "aws_s3_object" "scheduler" {
  bucket = aws_s3_bucket.lake.bucket
  key    = "spark/fairscheduler.xml"
  source = "${path.module}/../../cdc_assets/lake/spark/fairscheduler.xml"
}

# What runs as Spark is verified before it is uploaded, to where Spark may only read.
resource "aws_s3_object" "jar" {
  for_each    = local.spark_jars
  bucket      = aws_s3_bucket.lake.bucket
  key         = "spark/jars/${each.key}"
  source      = "${var.spark_jars_folder}/${each.key}"
  source_hash = each.value

  lifecycle {
    precondition {
      condition     = filesha256("${var.spark_jars_folder}/${each.key}") == each.value
      error_message = "${each.key} isn't what cdc_assets/lake/spark/jars.py lists: fetch it again by python -m cdc_assets.lake.spark.jars --to FOLDER."
    }
  }
}

resource "aws_s3_object" "python" {
  bucket      = aws_s3_bucket.lake.bucket
  key         = "spark/python.tar.gz"
  source      = var.spark_python_archive
  source_hash = filesha256(var.spark_python_archive)
}

resource "aws_s3_object" "certificates" {
  bucket = aws_s3_bucket.lake.bucket
  key    = "spark/certificates.zip"
  source = var.certificates_file
}

# Between its nodes Spark speaks TLS: rows and keys pass there. At rest the bucket encrypts.
resource "aws_emr_security_configuration" "spark" {
  name_prefix = "${var.name}-"
  configuration = jsonencode({
    EncryptionConfiguration = {
      EnableAtRestEncryption    = false
      EnableInTransitEncryption = true
      InTransitEncryptionConfiguration = {
        TLSCertificateConfiguration = {
          CertificateProviderType = "PEM"
          S3Object                = "s3://${aws_s3_object.certificates.bucket}/${aws_s3_object.certificates.key}"
        }
      }
    }
  })
}

resource "aws_security_group" "primary" {
  name_prefix            = "${var.name}-primary-"
  description            = "Spark Connect: whoever reaches it runs code there."
  vpc_id                 = var.vpc_id
  revoke_rules_on_delete = true
}

resource "aws_security_group" "core" {
  name_prefix            = "${var.name}-core-"
  description            = "The nodes of Spark."
  vpc_id                 = var.vpc_id
  revoke_rules_on_delete = true
}

resource "aws_vpc_security_group_ingress_rule" "connect" {
  security_group_id            = aws_security_group.primary.id
  referenced_security_group_id = var.client_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = local.connect_port
  to_port                      = local.connect_port
  description                  = "Spark Connect from the code server"
}

resource "aws_emr_cluster" "spark" {
  name                              = "${var.name}-spark"
  release_label                     = var.emr_release
  applications                      = ["Spark"]
  service_role                      = aws_iam_role.emr.arn
  security_configuration            = aws_emr_security_configuration.spark.name
  keep_job_flow_alive_when_no_steps = true
  termination_protection            = true
  log_uri                           = "s3://${aws_s3_bucket.lake.bucket}/logs/emr/"

  ec2_attributes {
    subnet_id                         = var.subnet_id
    instance_profile                  = aws_iam_instance_profile.spark.arn
    emr_managed_master_security_group = aws_security_group.primary.id
    emr_managed_slave_security_group  = aws_security_group.core.id
  }

  master_instance_group {
    instance_type = var.instance_type
  }

  core_instance_group {
    instance_type  = var.instance_type
    instance_count = var.core_instances
  }

  configurations_json = jsonencode([
    { Classification = "spark-defaults", Properties = local.spark_defaults },
  ])

  step {
    name              = "Spark Connect"
    action_on_failure = "CANCEL_AND_WAIT"
    hadoop_jar_step {
      jar = "command-runner.jar"
      args = [
        "spark-submit", "--deploy-mode", "client",
        "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal",
      ]
    }
  }

  # The managed policy of the service acts on what carries this tag only.
  tags = { "for-use-with-amazon-emr-managed-policies" = "true" }

  lifecycle {
    ignore_changes = [step]
  }
}
