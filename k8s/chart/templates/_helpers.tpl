{{/*
A null in values removes the key, so that templates would look for what is not there. Each template
begins with this: what is missing is as in values.yaml. What is handed to Kubernetes as it is keeps
Helm's own meaning of a null: the field is left out.
*/}}
{{- define "npu-agent.complete" -}}
{{- $default := .Files.Get "files/values.yaml" | fromYaml }}
{{- range $key := list "resources" "securityContext" "podSecurityContext" }}
  {{- if hasKey $.Values $key }}
    {{- $_ := unset $default $key }}
  {{- end }}
{{- end }}
{{- $_ := mergeOverwrite $default .Values }}
{{- $_ := set . "Values" $default }}
{{- end }}

{{/*
Objects have the names of k8s/, whatever the release is called: there is one agent in a cluster.
Two that share it (nodeSelector, affinity) take nameOverride, which is in the selectors as well.
*/}}
{{- define "npu-agent.name" -}}
{{- .Values.nameOverride | default "npu-agent" -}}
{{- end }}

{{- define "npu-agent.fullname" -}}
{{- .Values.fullnameOverride | default (include "npu-agent.name" .) -}}
{{- end }}

{{/* The ConfigMap with the config file; the vendor's name for it, unless the agent has another. */}}
{{- define "npu-agent.configMap" -}}
{{- $name := include "npu-agent.fullname" . -}}
{{- .Values.existingConfigMap | default (eq $name "npu-agent" | ternary "npu-device-plugin" (printf "%s-config" $name)) -}}
{{- end }}

{{/* Pull secrets: those that all charts share, then the release's, each once; as a JSON list of objects. */}}
{{- define "npu-agent.imagePullSecrets" -}}
{{- $secrets := list }}
{{- range concat (.Values.global.imagePullSecrets | default list) .Values.imagePullSecrets }}
  {{- $secrets = append $secrets (kindIs "string" . | ternary (dict "name" .) .) }}
{{- end }}
{{- toJson (uniq $secrets) }}
{{- end }}

{{- define "npu-agent.serviceAccount" -}}
{{- with .Values.serviceAccount.name -}}
{{- . -}}
{{- else -}}
{{- if not .Values.serviceAccount.create -}}
{{- fail "serviceAccount.create is false: set serviceAccount.name to an account that exists" -}}
{{- end -}}
{{- include "npu-agent.fullname" . -}}
{{- end -}}
{{- end }}

{{/* How the agent's reads are held to its Node: rbac.mode, or what the cluster's version allows. */}}
{{- define "npu-agent.rbacMode" -}}
{{- if ne .Values.rbac.mode "auto" -}}
{{- .Values.rbac.mode -}}
{{- else -}}
{{- semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version | ternary "impersonation" "policies" -}}
{{- end -}}
{{- end }}

{{/* By which the Pods are found. Never more than this: a DaemonSet's selector cannot change. */}}
{{- define "npu-agent.selector" -}}
app.kubernetes.io/name: {{ include "npu-agent.name" . }}
{{- end }}

{{/* What every object and every Pod is labelled with, as YAML. */}}
{{- define "npu-agent.common" -}}
{{- $own := dict
  "app.kubernetes.io/name" (include "npu-agent.name" .)
  "app.kubernetes.io/instance" .Release.Name
  "app.kubernetes.io/version" .Chart.AppVersion
  "app.kubernetes.io/component" "node-agent"
  "app.kubernetes.io/part-of" "npu-agent"
  "app.kubernetes.io/managed-by" .Release.Service }}
{{- toYaml (mergeOverwrite $own .Values.commonLabels) -}}
{{- end }}

{{- define "npu-agent.labels" -}}
{{- $chart := printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- toYaml (merge (include "npu-agent.common" . | fromYaml) (dict "helm.sh/chart" $chart)) -}}
{{- end }}

{{- define "npu-agent.podLabels" -}}
{{- toYaml (mergeOverwrite (include "npu-agent.common" . | fromYaml) .Values.podLabels) -}}
{{- end }}

{{/* repository:tag@digest, from the registry that all charts share if there is one. */}}
{{- define "npu-agent.image" -}}
{{- $repository := .Values.image.repository }}
{{- with .Values.global.imageRegistry }}
  {{- /* What has a dot or a port before its first slash is a registry already: this one is in its place. */}}
  {{- $path := regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $repository "" }}
  {{- $repository = printf "%s/%s" (trimSuffix "/" .) $path }}
{{- end }}
{{- printf "%s:%s" $repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{/* The kubelet's directory of plugin sockets: config.pluginDir, or the one in kubeletRootDir. */}}
{{- define "npu-agent.pluginDir" -}}
{{- $usual := "/var/lib/kubelet" }}
{{- $root := .Values.kubeletRootDir | default $usual | trimSuffix "/" }}
{{- $given := dig "pluginDir" "" .Values.config | trimSuffix "/" }}
{{- $there := printf "%s/device-plugins" $root }}
{{- if and $given (ne $root $usual) (ne $given $there) }}
{{- fail (printf "kubeletRootDir is %s and config.pluginDir is %s: remove config.pluginDir, which is then %s" $root $given $there) }}
{{- end }}
{{- $given | default $there }}
{{- end }}

{{/* The port of config.metrics.listen, for Prometheus. */}}
{{- define "npu-agent.port" -}}
{{- dig "metrics" "listen" ":9100" .Values.config | regexFind "[0-9]+$" -}}
{{- end }}

{{/* The port of config.metrics.probes, or the next one after that of metrics.listen. */}}
{{- define "npu-agent.probesPort" -}}
{{- with dig "metrics" "probes" "" .Values.config -}}
{{- if regexMatch "^(127\\.|localhost:|\\[::1\\])" . -}}
{{- fail (printf "config.metrics.probes is %s, where no kubelet reaches it: leave out the host, as in :9101" .) -}}
{{- end -}}
{{- regexFind "[0-9]+$" . -}}
{{- else -}}
{{- include "npu-agent.port" . | atoi | add1 -}}
{{- end -}}
{{- end }}

{{/*
The objects of a file of files/, made by `make manifests`, with this release's names, account,
labels and (unless the kind has none) namespace, as a JSON list: {"objects": [...]}.
*/}}
{{- define "npu-agent.objects" -}}
{{- $root := .root }}
{{- $objects := list }}
{{- range $text := regexSplit "(?m)^---$" (.root.Files.Get (printf "files/%s" .file)) -1 }}
  {{- $object := fromYaml $text }}
  {{- $name := include "npu-agent.fullname" $root }}
  {{- $account := include "npu-agent.serviceAccount" $root }}
  {{- $_ := set $object.metadata "name" (regexReplaceAll "^npu-agent" $object.metadata.name $name) }}
  {{- $_ := set $object.metadata "labels" (merge (include "npu-agent.labels" $root | fromYaml) $object.metadata.labels) }}
  {{- if $object.metadata.namespace }}
    {{- $_ := set $object.metadata "namespace" $root.Release.Namespace }}
  {{- end }}
  {{- with dig "spec" "policyName" "" $object }}
    {{- $_ := set $object.spec "policyName" (regexReplaceAll "^npu-agent" . $name) }}
  {{- end }}
  {{- with $object.roleRef }}
    {{- $_ := set . "name" (regexReplaceAll "^npu-agent" .name $name) }}
  {{- end }}
  {{- range $object.subjects }}
    {{- $_ := set . "name" $account }}
    {{- $_ := set . "namespace" $root.Release.Namespace }}
  {{- end }}
  {{- range $object.rules }}
    {{- if .resourceNames }}
      {{- $_ := set . "resourceNames" (list $name) }}
    {{- end }}
  {{- end }}
  {{- range (dig "spec" "matchConditions" list $object) }}
    {{- $_ := set . "expression" (.expression | replace ":npu-agent$" (printf ":%s$" ($account | replace "." "[.]"))) }}
  {{- end }}
  {{- $objects = append $objects $object }}
{{- end }}
{{- toJson (dict "objects" $objects) }}
{{- end }}

{{/* The same, as YAML documents. */}}
{{- define "npu-agent.documents" -}}
{{- range (include "npu-agent.objects" . | fromJson).objects }}
---
{{ toYaml . }}
{{- end }}
{{- end }}
