# Who may do what: the least that reading and writing the lake takes, for Spark and for the code
# server with its flusher.

data "aws_caller_identity" "this" {}

data "aws_iam_policy_document" "lake" {
  statement {
    sid       = "Bucket"
    actions   = ["s3:ListBucket", "s3:GetBucketLocation", "s3:ListBucketMultipartUploads"]
    resources = [aws_s3_bucket.lake.arn]
  }

  statement {
    sid       = "Objects"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    resources = [for folder in ["staging", "warehouse", "logs"] : "${aws_s3_bucket.lake.arn}/${folder}/*"]
  }

  statement {
    sid       = "Jars"
    actions   = ["s3:GetObject"]
    resources = ["${aws_s3_bucket.lake.arn}/spark/*"]
  }

  statement {
    sid = "Catalog"
    actions = [
      "glue:GetDatabase", "glue:GetDatabases", "glue:CreateTable", "glue:GetTable",
      "glue:GetTables", "glue:UpdateTable", "glue:DeleteTable",
    ]
    resources = concat(
      ["arn:aws:glue:${var.region}:${data.aws_caller_identity.this.account_id}:catalog"],
      flatten([
        for name in var.namespaces : [
          "arn:aws:glue:${var.region}:${data.aws_caller_identity.this.account_id}:database/${name}",
          "arn:aws:glue:${var.region}:${data.aws_caller_identity.this.account_id}:table/${name}/*",
        ]
      ]),
    )
  }
}

resource "aws_iam_policy" "lake" {
  name        = "${var.name}-lake"
  description = "Read and write the lake's tables and staged changes."
  policy      = data.aws_iam_policy_document.lake.json
}

data "aws_iam_policy_document" "secrets" {
  statement {
    actions   = ["secretsmanager:GetSecretValue"]
    resources = var.source_secret_arns
  }
}

# For the role of the code server's tasks (ECS, EKS or a host), beside the policy of the lake.
resource "aws_iam_policy" "secrets" {
  count       = length(var.source_secret_arns) > 0 ? 1 : 0
  name        = "${var.name}-secrets"
  description = "Read the sources' DSNs."
  policy      = data.aws_iam_policy_document.secrets.json
}

data "aws_iam_policy_document" "ec2" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "spark" {
  name               = "${var.name}-spark"
  assume_role_policy = data.aws_iam_policy_document.ec2.json
}

resource "aws_iam_role_policy_attachment" "spark_lake" {
  role       = aws_iam_role.spark.name
  policy_arn = aws_iam_policy.lake.arn
}

resource "aws_iam_instance_profile" "spark" {
  name = "${var.name}-spark"
  role = aws_iam_role.spark.name
}

data "aws_iam_policy_document" "emr" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["elasticmapreduce.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "emr" {
  name               = "${var.name}-emr"
  assume_role_policy = data.aws_iam_policy_document.emr.json
}

resource "aws_iam_role_policy_attachment" "emr" {
  role       = aws_iam_role.emr.name
  policy_arn = "arn:aws:iam::aws:policy/service-role/AmazonEMRServicePolicy_v2"
}
