#!/bin/sh
# The buckets, and who may do what in them; may be run again. Nobody else has the store's root key.
set -eu
objects='"s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"'
bucket='"s3:ListBucket", "s3:GetBucketLocation", "s3:ListBucketMultipartUploads"'
for place in lake logs; do
  mc mb --ignore-existing "store/$place"
  cat > "/tmp/$place.json" <<EOF
{"Version": "2012-10-17", "Statement": [
  {"Effect": "Allow", "Action": [$bucket], "Resource": ["arn:aws:s3:::$place"]},
  {"Effect": "Allow", "Action": [$objects], "Resource": ["arn:aws:s3:::$place/*"]}]}
EOF
  mc admin policy create store "$place" "/tmp/$place.json"
done
# A user and the policies that it has; one that is there gets the password of today.
user() {
  mc admin user add store "$1" "$2"
  name=$1
  shift 2
  for policy in "$@"; do
    mc admin policy attach store "$policy" --user "$name" || true # it is attached already
  done
}
user lake "$LAKE_PASSWORD" lake
user logs "$LOGS_PASSWORD" logs
user code "$CODE_PASSWORD" lake logs
