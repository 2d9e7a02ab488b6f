{{- define "sluice.name" -}}
{{- if contains "sluice" .Release.Name }}{{ .Release.Name | trunc 32 | trimSuffix "-" }}{{ else }}{{ printf "%s-sluice" .Release.Name | trunc 32 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* Labels that select the pods of one part: (dict "root" . "part" "rollout"). */}}
{{- define "sluice.selector" -}}
app.kubernetes.io/name: sluice
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "sluice.labels" -}}
{{ include "sluice.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* The image of a part: its own, or that of its role. */}}
{{- define "sluice.image" -}}
{{- $image := .root.Values.image -}}
{{- .values.image | default (printf "%s/%s:%s" $image.repository .role ($image.tag | default .root.Chart.AppVersion)) }}
{{- end }}

{{- define "sluice.tlsSecret" -}}
{{- $tls := .Values.security.tls -}}
{{- if eq $tls.mode "certManager" }}{{ include "sluice.name" . }}-tls{{ else }}{{ $tls.secretName }}{{ end }}
{{- end }}

{{- define "sluice.peers" -}}
{{- $name := include "sluice.name" . -}}
[peers]
weightsync = "{{ $name }}-weightsync:{{ .Values.weightsync.port }}"
trainer = "{{ $name }}-trainer:{{ .Values.trainer.port }}"
rollout = ["dns:///{{ $name }}-rollout:{{ .Values.rollout.port }}"]
orchestrator = "{{ $name }}-orchestrator:{{ .Values.orchestrator.port }}"
{{- if .Values.gateway.enabled }}
gateway = "{{ $name }}-gateway:{{ .Values.gateway.port }}"
{{- end }}
{{- end }}
