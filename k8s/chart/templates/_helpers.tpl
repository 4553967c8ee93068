{{/* Objects have the names of k8s/, whatever the release is called: there is one agent in a cluster. */}}
{{- define "npu-agent.labels" -}}
app.kubernetes.io/name: npu-agent
app.kubernetes.io/part-of: npu-agent
{{- end }}

{{/* The port of config.metrics.listen, for Prometheus. */}}
{{- define "npu-agent.port" -}}
{{- dig "metrics" "listen" ":9100" .Values.config | regexFind "[0-9]+$" -}}
{{- end }}

{{/* The port of config.metrics.probes, or the next one after that of metrics.listen. */}}
{{- define "npu-agent.probesPort" -}}
{{- with dig "metrics" "probes" "" .Values.config -}}
{{- regexFind "[0-9]+$" . -}}
{{- else -}}
{{- include "npu-agent.port" . | atoi | add1 -}}
{{- end -}}
{{- end }}

{{/* A file of files/, made by `make manifests`, with the release's namespace. */}}
{{- define "npu-agent.file" -}}
{{- $object := .root.Files.Get (printf "files/%s" .file) | fromYaml -}}
{{- $_ := set $object.metadata "namespace" .root.Release.Namespace -}}
{{- toYaml $object -}}
{{- end }}
