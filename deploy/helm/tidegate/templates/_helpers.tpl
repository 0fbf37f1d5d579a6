{{- define "tidegate.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tidegate.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tidegate.labels" -}}
{{ include "tidegate.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "tidegate.secret" -}}
{{- if .Values.existingSecret -}}
{{- .Values.existingSecret -}}
{{- else if .Values.adminToken -}}
{{- include "tidegate.name" . -}}
{{- else -}}
{{- fail "set adminToken, or existingSecret with the key admin-token" -}}
{{- end -}}
{{- end -}}

{{- define "tidegate.serviceAccount" -}}
{{- $own := ternary (include "tidegate.name" .) "default" .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default $own -}}
{{- end -}}

{{/* Key of the Secret with the token of the API; empty without one. */}}
{{- define "tidegate.apiTokenKey" -}}
{{- if .Values.existingSecret -}}
{{- .Values.existingSecretKeys.apiToken -}}
{{- else if or .Values.apiToken .Values.generateApiToken -}}
api-token
{{- end -}}
{{- end -}}

{{/* Token of the API: a generated one is that of the Secret, if the release has one already. */}}
{{- define "tidegate.apiToken" -}}
{{- $secret := lookup "v1" "Secret" .Release.Namespace (include "tidegate.name" .) | default dict -}}
{{- $known := get ($secret.data | default dict) "api-token" | b64dec -}}
{{- .Values.apiToken | default $known | default (randAlphaNum 32) -}}
{{- end -}}

{{- define "tidegate.adminTokenKey" -}}
{{- ternary .Values.existingSecretKeys.adminToken "admin-token" (not (empty .Values.existingSecret)) -}}
{{- end -}}

{{/* Whether all replicas share their counters; empty if not. */}}
{{- define "tidegate.shared" -}}
{{- $store := .Values.config.store | default dict -}}
{{- if or $store.redis $store.sentinel -}}true{{- end -}}
{{- range .Values.env -}}
{{- if eq .name "TIDEGATE_REDIS" -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Connections of each listener: two per MiB of the memory limit, so that all listeners can be full of
connections with half a request of 64 KiB. Empty without a limit.
*/}}
{{- define "tidegate.maxConnections" -}}
{{- $memory := dig "limits" "memory" "" (.Values.resources | default dict) | toString -}}
{{- if regexMatch "^[0-9.]+[MG]i?$" $memory -}}
{{- $unit := ternary 1024 1 (contains "G" $memory) -}}
{{- mulf 2 $unit (regexFind "^[0-9.]+" $memory | float64) | int | max 1 | min 16384 -}}
{{- else if $memory -}}
{{- fail "resources.limits.memory has no unit of Mi, Gi, M or G: set config.listen.max_connections" -}}
{{- end -}}
{{- end -}}

{{- define "tidegate.config" -}}
{{- $listen := dict "admin" "0.0.0.0:8082" "shutdown_delay" .Values.shutdownDelay -}}
{{- if eq .Values.command "gateway" -}}
{{- $_ := set $listen "gateway" "0.0.0.0:8000" -}}
{{- else -}}
{{- $_ := set $listen "http" "0.0.0.0:8080" -}}
{{- $_ := set $listen "grpc" "0.0.0.0:8081" -}}
{{- end -}}
{{- $secrets := "/run/secrets/tidegate" -}}
{{- $key := include "tidegate.adminTokenKey" . -}}
{{- $auth := dict "admin_token_file" (printf "%s/%s" $secrets $key) -}}
{{- with include "tidegate.apiTokenKey" . -}}
{{- $_ := set $auth "api_token_file" (printf "%s/%s" $secrets .) -}}
{{- end -}}
{{- if .Values.resp.enabled -}}
{{- if not (include "tidegate.apiTokenKey" .) -}}
{{- fail "resp.enabled needs a token: set apiToken or generateApiToken, or existingSecretKeys.apiToken" -}}
{{- end -}}
{{- $_ := set $listen "resp" "0.0.0.0:8083" -}}
{{- end -}}
{{- if not (dig "listen" "max_connections" "" .Values.config) -}}
{{- with include "tidegate.maxConnections" . -}}
{{- $_ := set $listen "max_connections" (int .) -}}
{{- end -}}
{{- end -}}
{{- mergeOverwrite (deepCopy .Values.config) (dict "listen" $listen "auth" $auth) | toYaml -}}
{{- end -}}
