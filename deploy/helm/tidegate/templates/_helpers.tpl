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

{{- define "tidegate.config" -}}
{{- $listen := dict "admin" "0.0.0.0:8082" "shutdown_delay" .Values.shutdownDelay -}}
{{- if eq .Values.command "gateway" -}}
{{- $_ := set $listen "gateway" "0.0.0.0:8000" -}}
{{- else -}}
{{- $_ := set $listen "http" "0.0.0.0:8080" -}}
{{- $_ := set $listen "grpc" "0.0.0.0:8081" -}}
{{- end -}}
{{- $auth := dict "admin_token_file" "/run/secrets/tidegate/admin-token" -}}
{{- mergeOverwrite (deepCopy .Values.config) (dict "listen" $listen "auth" $auth) | toYaml -}}
{{- end -}}
